"""Measures on the user's own model and machine what a live change costs, and what else it would.

`llamactl bench` is one run of a grid of cells: each holds so many tokens in so many slots of a
context of so many cells, and measures ours and what it is held against in turn. Floors; a module
imports downward only, and `tests/test_floors.py` enforces it:

    0 one cell, what was found in it, and on which machine: cell
    0 numbers that differ from round to round: spread
    1 the machine, and who else was at work on it: machine
    1 which cells there are, and what they take: grid
    1 what was finished, in a file: record
    1 what is asked of an engine: asking
    2 which of them there is memory for: room
    2 one cell, measured: measure
    2 tables: tables
    2 plots: plots
    3 one cell after the other: runner
    3 all of it: report

Engines are those of `llamactl_validate`: private, and gone with the command. Nothing here imports
the `llamactl` command; `plots` alone needs matplotlib, which is optional.
"""
