"""The parts of `llamactl run`, the program in `shim.py`: standard library only, quick to import.

words     the command line: ours, and as much of llama-server's as has to be known at once
context   what a process inherits from its caller, taken down for the daemon
places    where the daemon is, and whether one that is started here would survive us
link      one HTTP connection to the daemon's control socket
relay     bytes from the caller's port to the engine's private socket and back
engine    the engine's process: whether it lives, and how it ended if nobody tells
screen    the engine's log and our own lines, to a stdout and stderr that may not read them
owner     one run from its request to its end
"""
