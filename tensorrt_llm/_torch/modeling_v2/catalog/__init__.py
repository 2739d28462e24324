"""Records of the operators that targets call: what each computes, for which inputs, and how it is
checked. `_op` is the guide for a new one."""
