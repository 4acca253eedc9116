//! How the vector of a text is made of its final hidden states, as a file of an embedding model says.

use crate::error::ModelError;
use crate::gguf::Gguf;

/// Key of the way, without the architecture's prefix (`enum llama_pooling_type` of llama.cpp).
pub(crate) const POOLING_KEY: &str = "pooling_type";

/// Hidden states of which the vector of a text is made.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Pooling {
    /// The mean of all. Also of models that are not made for embedding.
    #[default]
    Mean,
    /// The first.
    First,
    /// The last.
    Last,
}

impl Pooling {
    /// Way that the file of a model of this architecture states.
    ///
    /// # Errors
    /// [`ModelError::Hyperparameter`] for another way, such as that of models that rank texts.
    pub(crate) fn of(gguf: &Gguf, architecture: &str) -> Result<Self, ModelError> {
        let key = format!("{architecture}.{POOLING_KEY}");
        match gguf.u32(&key)? {
            None | Some(0 | 1) => Ok(Self::Mean),
            Some(2) => Ok(Self::First),
            Some(3) => Ok(Self::Last),
            Some(_) => Err(ModelError::Hyperparameter {
                key,
                reason: "this way of making the vector of a text is not supported; 0 and 1 (mean), 2 (first \
                         token) and 3 (last token) are",
            }),
        }
    }

    /// Number in a file.
    pub(crate) fn gguf(self) -> u32 {
        match self {
            Self::Mean => 1,
            Self::First => 2,
            Self::Last => 3,
        }
    }

    /// Name for clients. A change of one bit of the vectors needs a new name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Mean => "mean-hidden-1",
            Self::First => "first-hidden-1",
            Self::Last => "last-hidden-1",
        }
    }
}
