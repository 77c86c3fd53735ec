"""What every HTTP application here needs: bounds for heads and bodies, streams that notice when a client leaves."""
