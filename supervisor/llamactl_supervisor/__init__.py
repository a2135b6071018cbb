"""The daemon that owns one llama-server and changes its geometry without relaunching it.

Floors; a module imports downward only, and `tests/test_floors.py` enforces it:

    0 pure: errors fields models paths settings api_settings resolve config
    0 pure: backoff launch plan events snapshot commands reload state view engine_metrics
    0 pure, what the engine says: progress facts
    1 one thing each: process ports store instances keys ledger crashes logs metrics operations
    1 one thing each: engine notify activation locks
    1 one file of its own: daemon_log
    1 one socket each: listener tokens
    2 eyes: observer
    2 before anything is stopped: preflight
    2 the other end: client
    3 hands: effects records scrape control announcer reap
    4 the door for strangers: guard
    4 a bound for everybody: body_limit
    4 what is published: describe
    5 every door: listeners
    6 the loop: daemon
    7 the entry: __main__

`holder.py` stands apart: a program of its own, stdlib only, the engine's parent.
"""
