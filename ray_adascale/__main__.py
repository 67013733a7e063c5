"""``python -m ray_adascale``: the command line, where the script ``ray-adascale`` is
not on the path.
"""

import sys

from .cli.main import main

sys.exit(main())
