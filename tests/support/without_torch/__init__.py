"""A folder for the path of processes in front of where PyTorch is installed; nothing imports it as a package.

Start reading at `torch.py`.
"""
