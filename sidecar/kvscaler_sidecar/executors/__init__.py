"""What computes the steps that the scheduler plans; `seam` says what each executor offers."""
