"""Small cases from public bug reports of projects that do the same job, a file per kind; each has one right answer."""
