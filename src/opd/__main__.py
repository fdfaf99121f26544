"""`python -m opd` is `opd`, so that `accelerate launch -m opd train recipe.yaml` works."""

from opd.cli import main

main()
