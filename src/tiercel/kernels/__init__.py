"""Hot leaves: primitive arguments only, each with a plain-torch twin that stays. Imports nothing of ours."""
