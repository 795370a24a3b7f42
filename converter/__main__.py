"""python -m converter: the same as convert-mtp."""

import sys

from converter.cli import convert_main

sys.exit(convert_main())
