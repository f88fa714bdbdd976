"""Many runs of a recipe: plan them, launch them, put them in a table."""
