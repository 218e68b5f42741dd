"""Calls of torch's operators, for the import of each to be compared with torch itself.

python -m tests.support.torch_operators            # all of them, one by one; some minutes
python -m tests.support.torch_operators layers
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import tvm
from tvm import relax

from tvm_ext import relay
from tvm_ext._tvm import Constant
from tvm_ext.errors import TvmExtError
from tvm_ext.relay_passes.fold_calls import FoldCalls

from .exported_models.programs import run_program
from .quick_target import UNOPTIMISED

# What a group's text may name: `t` is torch, `f` torch.nn.functional, a and b floats (2, 6, 8), p positive ones, n with
# NaN and infinities, i and j integers, m a mask, k places of the last axis but one.
UNARY = (
    "t.abs(a) t.acos(a/9) t.asin(a/9) t.atan(a) t.acosh(p+1) t.asinh(a) t.atanh(a/9) t.ceil(a) t.cos(a) t.cosh(a) "
    "t.erf(a) t.exp(a) t.floor(a) t.log(p) -a t.relu(a) t.rsqrt(p) t.sigmoid(a) t.sign(a) f.silu(a) t.sin(a) "
    "t.sinh(a) t.sqrt(p) t.square(a) t.tan(a/9) t.tanh(a) t.trunc(a) t.round(a*2) t.round(i+0.5) t.log2(p) "
    "t.log10(p) t.log1p(p) t.expm1(a) t.reciprocal(p) t.isnan(n) t.isinf(n) t.isfinite(n) t.isnan(i) t.relu(n) "
    "t.clamp(n,-1,1) t.sqrt(j) t.logical_not(a) t.bitwise_not(i) t.bitwise_not(m) t.abs(i) t.floor(i) t.exp(i) "
    "f.gelu(a) f.mish(a) f.gelu(a,approximate='tanh') f.leaky_relu(a,0.2) f.leaky_relu(n) f.elu(a) "
    "f.elu(a,alpha=0.5) f.celu(a,0.7) f.selu(a) f.softplus(a) f.softplus(a,beta=2.0,threshold=1.0) f.softsign(a) "
    "f.hardsigmoid(a*3) f.hardswish(a*3) f.hardtanh(a,-0.5,0.25) f.relu6(a*9) f.relu(i) f.logsigmoid(a) "
    "t.sigmoid(j) a.double() a.half().float() i.bool() a.int() m.float() t.nan_to_num(n)"
)
BINARY = (
    "a+b a+i a+2 2-a a-b*2 t.add(a,b,alpha=3) t.sub(a,b,alpha=0.5) t.rsub(a,b) i+1.5 i*j i-j a*b a/b i/j "
    "t.div(i,j,rounding_mode='floor') t.div(i,j,rounding_mode='trunc') t.div(a,b,rounding_mode='trunc') i//j a%b "
    "i%j a%-0.7 t.fmod(a,b) t.fmod(i,j) i%-3 t.maximum(a,b) t.minimum(a,n) t.maximum(n,b) p**b p**2 a**3 2**a "
    "p**0.5 a**2 i**2 t.atan2(a,b) a==b i==j a<b a<=0.1 i>1 i>=j a!=0 i<0.5 t.eq(i,a) m&(a>0) m|(a>0) m^(a>0) i&j "
    "i|j i^j i&3 t.logical_and(a,m) t.logical_or(i,m) t.logical_xor(a,b) t.where(m,a,b) t.where(m,a,1.0) "
    "t.where(m,i,a) a.masked_fill(m,-9.0) t.clamp(a,min=b) t.clamp(a,max=0.5) t.clamp(i,-1,2) t.clamp(i,max=0.5) "
    "t.lerp(a,b,0.3) t.addcmul(a,b,p,value=2.0) t.addcdiv(a,b,p) i.to(t.uint8)+200 i.to(t.int32)*i "
    "f.prelu(a,p[0,:,0]) t.logaddexp(a,b)"
)
SHAPES = (
    "a.view(12,8) a.reshape(-1) a.permute(2,0,1) a.transpose(0,-1) a[0,0].t() a.unsqueeze(-1) a[:1].squeeze(0) "
    "a.flatten(1) a[:,-2] a[:,1:5:2] a[...,-3:] a[:,4:2] a.narrow(1,2,3) a.expand(3,2,6,8) t.cat([a,b],-1) "
    "t.cat([a,i],1) t.stack([a,b],1) t.stack([a,b],-1) *a.split(4,1) *a.chunk(3,1) *a.unbind(0) *a.split([1,5],1) "
    "a.repeat(2,1,3) t.tile(a[0],(2,)) a.flip(1) a.flip([0,-1]) t.roll(a,3,1) t.roll(a,(1,-2),(0,2)) t.roll(a,5) "
    "f.pad(a,(1,2)) f.pad(a,(0,1,2,-1),value=3.0) f.pad(a,(1,1),mode='reflect') f.pad(a,(2,1),mode='replicate') "
    "f.embedding(k,a[0]) a.index_select(1,k[0]) a[:,k[0]] a[:,k[0]-6] a[:,k[0]-3] a[k[0]%2,k[0]] a[k%2] "
    "a[:,k[0],k[0]] a.gather(1,k[:,:3,None].expand(2,3,8)) a[0].gather(0,k) t.tril(a) t.triu(a,1) t.tril(a,-2) "
    "t.arange(6)+k t.full_like(a,2.5)*b t.zeros_like(i)+i t.ones(3,8)+a[0,:3] t.eye(8)@p[0].t() "
    "t.linspace(0,1,8)+a t.meshgrid(k[0],k[0],indexing='ij')[1] a.new_zeros(8)+a a.new_full((8,),2.0)+a "
    "f.one_hot(k,6) t.diag_embed(a[0,0]) a.scatter(1,k[:,:3,None].expand(2,3,8),b[:,:3]) "
    "a[0].index_put((k[0],k[0]),b[0,:,0]) t.slice_scatter(a,b[:,:2],1,2,4) t.select_scatter(a,b[:,1],1,-1) "
    "f.pixel_shuffle(a.view(1,6*4,2,2),2) f.pixel_unshuffle(a,2) a.to(t.float64).contiguous() t.movedim(a,0,2) "
    "t.cat([a,a[:,:0]],1) t.repeat_interleave(a,2,dim=1) t.topk(a,3)[0] t.topk(a,3)[1] "
    "t.sort(a,-1)[0] t.sort(a,1,descending=True)[1] t.argsort(a,-1) a.T.sum() t.cumsum(a,1) t.cumsum(i,-1) "
    "t.cumprod(a,1)"
)
REDUCTIONS = (
    "a.sum() a.sum(1) a.sum((0,-1),keepdim=True) i.sum(-1) m.sum() m.sum(1) a.mean() a.mean((1,2)) "
    "a.mean(-1,keepdim=True) a.amax(1) a.amin((0,2),keepdim=True) a.max() i.min() a.max(1)[0] a.max(1)[1] "
    "a.min(-1,keepdim=True)[1] a.prod(1) a.var(1) a.var((1,2),correction=0,keepdim=True) a.std(-1) a.std() "
    "m.any() m.any(1) m.all() m.all(-1,keepdim=True) i.any() a.argmax() a.argmax(1) a.argmin(-1,keepdim=True) "
    "j.argmax(1) f.softmax(a,1) f.softmax(a,-1) f.log_softmax(a,0) f.normalize(a,dim=1) t.linalg.vector_norm(a) "
    "t.linalg.vector_norm(a,1,-1) t.linalg.vector_norm(a,float('inf'),(0,1)) t.logsumexp(a,1) n.max() "
    "n[:,1:].amax(1) a.double().mean(1) t.std_mean(a,1)[1] a.half().sum(1)"
)
LAYERS = (
    "a@b.transpose(1,2) a[0]@p[0].t() t.bmm(a,b.transpose(1,2)) f.linear(a,b[0]) f.linear(a,b[0],p[0,:,0]) "
    "a[0]@b[0,0] t.addmm(a[0,:,:6],a[0],b[0].t(),beta=0.5,alpha=2.0) t.baddbmm(a[:,:,:6],a,b.transpose(1,2)) "
    "(a.double()@b.double().mT) (i[0]@j[0].t()) a[0,0]@b[0,0] t.einsum('bij,bkj->bik',a,b) t.outer(a[0,0],b[0,0]) "
    "f.layer_norm(a,(8,)) f.layer_norm(a,(6,8),p[0],b[0]) f.group_norm(a,3) f.group_norm(a,2,p[0,:,0],b[0,:,0]) "
    "f.batch_norm(a,b[0,:,0],p[0,:,0],p[1,:,1],b[1,:,1]) f.batch_norm(a,b[0,:,0],p[0,:,0]) "
    "f.conv1d(a,b[:,:,:3].contiguous()) f.conv1d(a,b[:,:3,:3].repeat(3,1,1),p[0,:,0],2,1,2,2) "
    "f.conv2d(a[:,None],b[:,None,:3,:3]) "
    "f.conv2d(a[:,None],b[:,None,:3,:2],stride=(2,1),padding=(1,2),dilation=(1,2)) "
    "f.conv2d(a[None],b[:,None,:3,:3],groups=2,padding='same') "
    "f.conv3d(a[None,None],b[:,None,None,:2,:3]) "
    "f.conv_transpose1d(a,b.permute(1,0,2)[:,:,:3],stride=2) "
    "f.conv_transpose2d(a[None],b[:,None,:3,:3].repeat(1,2,1,1),stride=2,padding=1,output_padding=1) "
    "f.conv_transpose2d(a[None],b.permute(1,0,2)[:2,:,None,:3],groups=2) f.max_pool1d(a,3,2,1) f.max_pool2d(a,2) "
    "f.max_pool2d(a[None],3,2,1,ceil_mode=True) f.max_pool2d(a[None],2,1,0,2) f.max_pool3d(a[None],2) "
    "f.avg_pool1d(a,3,2,1) f.avg_pool1d(a,3,2,1,count_include_pad=False) f.avg_pool2d(a,2) "
    "f.avg_pool2d(a[None],3,2,1) f.avg_pool2d(a[None],3,2,1,count_include_pad=False) f.avg_pool2d(a[None],(2,3)) "
    "f.avg_pool3d(a[None],(2,2,4)) f.adaptive_avg_pool2d(a[None],1) f.adaptive_avg_pool2d(a[None],(3,4)) "
    "f.adaptive_avg_pool2d(a[None],(4,3)) f.adaptive_avg_pool1d(a,2) f.interpolate(a[None],scale_factor=2) "
    "f.interpolate(a[None],size=(9,5)) f.interpolate(a[None],scale_factor=2,mode='bilinear') "
    "f.interpolate(a[None],size=(9,5),mode='bilinear',align_corners=True) "
    "f.interpolate(a[None],size=(3,12),mode='bilinear') f.interpolate(a[None],scale_factor=2,mode='bicubic') "
    ""
    "f.scaled_dot_product_attention(a,b,p) f.scaled_dot_product_attention(a,b,p,is_causal=True) "
    "f.scaled_dot_product_attention(a,b[:,:4],p[:,:4],scale=0.3) "
    "f.scaled_dot_product_attention(a[None],b[None],p[None],attn_mask=m[:,:,:6]) "
    "f.scaled_dot_product_attention(a,b,p,attn_mask=b[:,:,:6]) "
    "f.scaled_dot_product_attention(a,b,p,attn_mask=m[:,:,:6]&(k[:,:,None]>2)) "
    "f.scaled_dot_product_attention(a[None],b[None,:1],p[None,:1],enable_gqa=True) f.cosine_similarity(a,b,1) "
    "f.glu(a,-1)"
)
GROUPS: Mapping[str, str] = {
    "unary": UNARY, "binary": BINARY, "shapes": SHAPES, "reductions": REDUCTIONS, "layers": LAYERS,
}  # fmt: skip


def inputs(seed: int = 0) -> dict[str, Any]:
    import torch

    generator = torch.Generator().manual_seed(seed)
    shape = (2, 6, 8)
    drawn = {name: torch.randn(shape, generator=generator) for name in "abn"}
    drawn["p"] = torch.rand(shape, generator=generator) + 0.3
    drawn["n"][0, 0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    drawn["i"] = torch.randint(-5, 6, shape, generator=generator)
    drawn["j"] = torch.randint(1, 5, shape, generator=generator)
    drawn["m"] = torch.rand(shape, generator=generator) > 0.4
    drawn["k"] = torch.stack([torch.randperm(6, generator=generator) for _ in range(2)])
    return drawn


def program_of(texts: list[str], values: Mapping[str, Any]) -> Any:
    """The program of a module that answers with each of the expressions ``texts``."""
    import torch

    call = eval(f"lambda t, f, {', '.join(values)}: [{', '.join(texts)}]")  # noqa: S307 (the texts above)

    class Calls(torch.nn.Module):  # type: ignore[misc]
        def forward(self, *given: Any) -> Any:
            return call(torch, torch.nn.functional, *given)

    module = Calls().eval()
    return module, torch.export.export(module, tuple(values.values()))


def problem_of(texts: list[str], values: Mapping[str, Any]) -> str:
    """What is wrong with the import of ``texts`` in one program, or "". NumPy evaluates it, or a library does."""
    import torch

    module, program = program_of(texts, values)
    wanted = [item.numpy() for item in torch.utils._pytree.tree_leaves(module(*values.values()))]
    mod, params = relay.frontend.from_torch(program)
    found = _evaluated(mod, params, list(values.values()))
    if any(item is None for item in found):
        found = run_program(relay.build(mod, UNOPTIMISED, params=params), mod, list(values.values()))
    for index, (mine, theirs) in enumerate(zip(found, wanted, strict=True)):
        near = 4e-3 if theirs.dtype == np.float16 else 1e-5
        if (mine.shape, mine.dtype) != (theirs.shape, theirs.dtype) or not np.allclose(
            mine, theirs, rtol=10 * near, atol=near, equal_nan=True
        ):
            what = f"{mine.dtype} {mine.shape} {mine.ravel()[:4]}, not {theirs.dtype} {theirs.ravel()[:4]}"
            return f"output {index} of {' '.join(texts)}: {what}"
    return ""


def _evaluated(mod: tvm.IRModule, params: Mapping[str, Any], values: list[Any]) -> list[Any]:
    names = [parameter.name for parameter in mod["main"].params]
    known = {name: tvm.runtime.tensor(value.numpy()) for name, value in zip(names, values, strict=False)}
    passes: Any = FoldCalls()
    main = passes(relax.transform.BindParams("main", {**params, **known})(mod))["main"]
    bindings = relax.analysis.get_var2val(main)

    def resolved(value: Any) -> Any:
        while isinstance(value, tvm.ir.Var) and value in bindings:
            value = bindings[value]
        return value

    output = resolved(main.body.body)
    fields = list(output.fields) if isinstance(output, relax.Tuple) else [output]
    return [item.value.numpy() if isinstance(item, Constant) else None for item in map(resolved, fields)]


def main(groups: list[str]) -> int:
    """Compare each call of ``groups``, all of them if empty, on its own. Returns how many are wrong or refused."""
    bad = 0
    for group in groups or GROUPS:
        for text in GROUPS[group].split():
            try:
                problem = problem_of([text], inputs())
            except TvmExtError as error:
                problem = f"{text} is refused: {error.problem}"
            bad += bool(problem)
            if problem:
                print(problem, flush=True)
    return bad


if __name__ == "__main__":
    sys.exit(1 if main(sys.argv[1:]) else 0)
