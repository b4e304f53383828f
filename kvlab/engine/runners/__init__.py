"""What carries out plans: torch (real decoding), simulated (a cost model), recorded (a real run's outcomes)."""
