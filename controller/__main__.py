"""``python -m kinlog.controller`` is the ``kinlog`` command."""

from kinlog.controller.cli import main

main()
