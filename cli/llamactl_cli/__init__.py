"""The `llamactl` command: one module per command, one owner of the screen.

    main       maps every error to one line, or one JSON object, and an exit code
    app        the commands by name, each imported when it is asked for
    options    how a value on the command line is written, and its bounds
    moments    the same for a moment, and a time span
    output     the only module that writes to stdout and stderr
    text       numbers, times, bars and tables for people
    views      what more than one command shows of an engine or of an operation
    connect    the way to the daemon
    without_daemon  what else a command says that finds none
    waiting    following an operation of the daemon to its end
    resume     the engine that was last asked for, which `up` goes on from
    provide    the engine and the model, built or fetched where they are missing
    holdings   what an engine holds, as rows: slots, pages, memory
    drift      what was set live to something else than was configured or asked for
    in_force   where a daemon goes by other values than a configuration that is read now
    smaps      what a process has in memory
    versions   what this command, and an engine, says that it is
    interrupts  signals that end a command which has to clear up, and to say what it had
    session    what a logout takes away
    remains_view  what status shows of engines whose daemon is gone
    checks/    what `doctor` looks at
    unit_files      systemd's units, filled in
    unit_install    their place
    unit_readiness  what a service will not have of what its installer has
    unit_start      a socket unit that stands installed and idle
    commands/  parse, one client call, emit a view
    shim       `llamactl run`, a program of its own; run/ has its parts

What a command prints is a view: `text` is its table and `data` its JSON. Importing the package is
cheap; what is heavy (the control client, the builder, rich) is imported where it is used.
"""
