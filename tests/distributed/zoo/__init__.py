"""A small training for each public class of Keras, to compare the trainer with Keras on all of them."""
