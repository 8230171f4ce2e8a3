"""`python -m kiln_client` is `kiln`."""

import sys

from kiln_client.cli.main import main

sys.exit(main())
