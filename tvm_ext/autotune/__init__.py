"""Measuring and choosing among candidates: no part of it is in this version; construction needs no measurement."""
