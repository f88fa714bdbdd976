"""Output layers that are split over processes, adapted or quantized; imported when first used."""
