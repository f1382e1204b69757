"""Remote generations: steps that arrive ahead, options, and what of the program the server calls."""
