"""The daemon that owns one llama-server and changes its geometry without relaunching it.

Floors; a module imports downward only, and `tests/test_floors.py` enforces it:

    0 pure: errors fields models paths settings resolve config
    0 pure: backoff launch plan events snapshot commands reload state view
    1 one thing each: process ports store instances ledger logs metrics operations engine notify
    1 one socket each: listener client
    2 hands: effects records control announcer reap
    3 the loop: daemon
    4 the entry: __main__

`holder.py` stands apart: a program of its own, stdlib only, the engine's parent.
"""
