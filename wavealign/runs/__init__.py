"""What a run is: its launch, its result, files of rows, pairing and comparing."""
