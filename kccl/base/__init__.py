"""What every other room uses: errors, settings, types, arguments, the ABI."""
