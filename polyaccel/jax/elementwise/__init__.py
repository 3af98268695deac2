"""Functions of whole arrays that JAX has traced, evaluated on flat slices of these where elements are independent."""
