"""Who owns which place: pools of typed ids with generations, and reservations over any set of them."""
