"""What every other folder uses: errors, settings, types, checks of arguments, the ABI."""
