"""Choice of a model between a base model and a trained model, by own data and guard data."""
