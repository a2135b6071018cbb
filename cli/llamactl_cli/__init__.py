"""The `llamactl` command: one module per command, one owner of the screen.

    main       maps every error to one line, or one JSON object, and an exit code
    app        the commands by name, each imported when it is asked for
    options    how a value on the command line is written, and its bounds
    moments    the same for a moment
    output     the only module that writes to stdout and stderr
    text       numbers, times, bars and tables for people
    holdings   what an engine holds, as rows: slots, pages, memory
    proc       what the kernel says of one process
    limits     how much memory is free, by machine and cgroup
    versions   what this command, and an engine, says that it is
    waiting    following an operation of the daemon to its end
    session    what a logout takes away
    remains    what a daemon that is gone left behind; remains_view what status shows of it
    provide    the engine and the model, built or fetched where they are missing
    checks/    what `doctor` looks at
    unit_files    systemd's units, filled in
    unit_install  their place
    commands/  parse, one client call, emit a view

What a command prints is a view: `text` is its table and `data` its JSON. Importing the package is
cheap; what is heavy (the control client, the builder, rich) is imported where it is used.
"""
