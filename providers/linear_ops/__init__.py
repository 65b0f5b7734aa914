"""How the providers of linear attention call their libraries: torch's side, imported in the helper only.

`homes.py` finds the entry point, `tensors.py` makes the tensors, the other modules know the calls.
"""
