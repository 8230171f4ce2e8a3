"""Runs the `kiln` command line as `python -m kiln_client`."""

import sys

from kiln_client.cli.main import main

sys.exit(main())
