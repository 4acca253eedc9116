//! Errors of packing weights.

/// Why weights cannot be packed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum PackError {
    /// The number of inputs is zero or not whole blocks of the weight type.
    #[error("a matrix has {cols} inputs, which is not a positive multiple of {block}")]
    Columns { cols: usize, block: usize },
    #[error("a matrix has no outputs")]
    NoRows,
    /// The data does not have the length that type and shape require.
    #[error("a matrix should have {expected} bytes and has {found}")]
    Length { expected: usize, found: usize },
    /// Matrices to be packed together differ in type or shape.
    #[error("matrices that belong together differ in type or shape")]
    Mismatch,
    /// In a stack, a matrix would start after this many outputs, within a panel.
    #[error("matrices cannot be stacked after {0} outputs, which is not a multiple of 16")]
    PartialPanel(usize),
    /// The size does not fit the address space.
    #[error("a matrix is too large for this machine's address space")]
    TooLarge,
    /// The operating system refused the memory for the weights.
    #[error("no memory for the weights; hold fewer layers or free some memory")]
    OutOfMemory(#[source] std::io::Error),
}
