"""`python -m lever` is `lever`."""

from lever.cli import main

main()
