"""Roller (paper §3): rTiles, alignment rules, construction of rPrograms and their emission."""
