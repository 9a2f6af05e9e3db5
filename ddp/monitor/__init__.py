"""What a run is measured by. Monitors hold numbers and return verdicts; the training loop acts on them."""
