"""What commands show on a terminal or write into a pipe, and what is typed there."""
