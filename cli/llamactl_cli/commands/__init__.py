"""The commands, one module each: parse, one client call, emit a view."""
