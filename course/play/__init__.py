"""What runs in the page: the course's Python inside the browser's worker."""
