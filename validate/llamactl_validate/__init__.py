"""Shows on the user's own model and machine that a change of a running engine loses nothing.

`llamactl validate` runs the scenarios of `suites/`, and so does the test suite: there is one
definition of each. Floors; a module imports downward only, and `tests/test_floors.py` enforces it:

    0 what is found: expecting
    0 a program of its own: lowly
    0 where a server may listen: ports
    0 what runs, to be ended at once: running
    1 another one, over daemons: warden
    1 what an engine is asked: asked
    1 one place of its own: workplace
    2 one engine of its own: engine
    3 what is asked of it: streams conversations
    3 one daemon of its own: daemon
    4 one scenario, and what it is given: scenario
    5 all of them: suites
    5 an engine that runs already, only looked at: attach
    5 whether there is room: preflight
    6 one after the other: runner
    7 what came of it: report

Nothing here imports the `llamactl` command, or a test framework.
"""
