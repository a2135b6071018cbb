"""The daemon that owns one llama-server and changes its geometry without relaunching it.

Floors; a module imports downward only, and `tests/test_floors.py` enforces it:

    0 pure: errors fields models paths settings api_settings resolve config
    0 pure: backoff launch plan events snapshot commands reload state view engine_metrics
    1 one thing each: process ports store instances keys ledger logs metrics operations engine
    1 one thing each: notify activation
    1 one file of its own: daemon_log
    1 one socket each: listener tokens
    2 hands: effects records scrape control announcer reap
    2 the other end: client
    3 the door for strangers: guard
    3 what is published: describe
    4 every door: listeners
    5 the loop: daemon
    6 the entry: __main__

`holder.py` stands apart: a program of its own, stdlib only, the engine's parent.
"""
