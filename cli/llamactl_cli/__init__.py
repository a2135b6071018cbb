"""The `llamactl` command: one module per command, one owner of the screen.

    main       maps every error to one line, or one JSON object, and an exit code
    app        the commands by name
    options    how a value on the command line is written, and its bounds
    output     the only module that writes to stdout and stderr
    text       numbers, times and tables for people
    waiting    following an operation of the daemon to its end
    session    what a logout takes away
    remains    what a daemon that is gone left behind
    provide    the engine and the model, built or fetched where they are missing
    unit_files    systemd's units, filled in
    unit_install  their place
    commands/  parse, one client call, emit a view

What a command prints is a view: `text` is its table and `data` its JSON. Importing the package is
cheap; what is heavy (the control client, the builder, rich) is imported where it is used.
"""
