"""The daemon that owns one llama-server and changes its geometry without relaunching it.

Floors; a module imports downward only, and `tests/test_floors.py` enforces it:

    0 pure: errors fields models paths settings api_settings resolve config
    0 pure: owner backoff launch repeat events snapshot commands reload apply applies carrying state
    0 pure: view engine_metrics refusals describe_api
    0 pure, what an engine is asked to be: option_table spec plan command_line offload
    0 pure, what is in files between two engines: carry fates
    0 pure, what the engine says: progress facts
    1 how long a request is meant: asking
    1 what the kernel says of a process: procfs
    1 what it keeps of a socket: hold
    2 one thing each: process ports store instances keys ledger crashes logs metrics operations
    2 one thing each: engine notify activation locks clock args fingerprint memory watch
    2 one thing each: pressure caller_secrets callers
    2 how long an answer is waited for: mute
    2 one file of its own: daemon_log
    2 one socket each: listener tokens
    3 eyes: observer
    3 before anything is stopped: preflight
    3 what outlives the daemon: durable
    3 what is left where no daemon answers: remains
    3 the other end, one call: transport
    4 what an engine holds, into the next one: carriage
    4 before there is a daemon: groundwork
    4 what something comes to: planner
    4 the runs that are connected: runs
    4 the configuration file as it changes: following
    4 hands: records scrape control announcer
    4 hands where no daemon is: reap
    4 the other end, for its users: client
    5 what an engine holds, one way each: carry_out carry_in
    5 the other end, where none runs: spawn
    5 the door for strangers: guard
    5 a bound for everybody: body_limit
    5 what is published: describe
    6 every door: listeners
    6 what an engine holds, both ways: carrier
    7 hands, at the engine: effects
    8 the loop: daemon
    9 the entry: __main__

`holder.py` stands apart: a program of its own, stdlib only, the engine's parent.
"""
