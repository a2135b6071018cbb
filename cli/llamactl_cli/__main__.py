"""`python -m llamactl_cli` is `llamactl`."""

import sys

from llamactl_cli.main import main

sys.exit(main())
