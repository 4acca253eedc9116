//! How the vector of a text is made of its final hidden states, as a file of an embedding model says.

use crate::error::ModelError;
use crate::gguf::Gguf;

/// Key of the way, without the architecture's prefix (`enum llama_pooling_type` of llama.cpp).
pub(crate) const POOLING_KEY: &str = "pooling_type";

/// Hidden states of which the vector of a text is made. The discriminants are the numbers in a model
/// file, and the texts are the names for clients. A change of one bit of the vectors needs a new
/// name.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, strum::FromRepr, strum::IntoStaticStr)]
#[repr(u32)]
pub enum Pooling {
    /// The mean of all. Also of models that are not made for embedding.
    #[default]
    #[strum(serialize = "mean-hidden-1")]
    Mean = 1,
    /// The first.
    #[strum(serialize = "first-hidden-1")]
    First = 2,
    /// The last.
    #[strum(serialize = "last-hidden-1")]
    Last = 3,
}

impl Pooling {
    /// Way that the file of a model of this architecture states.
    ///
    /// # Errors
    /// [`ModelError::Hyperparameter`] for another way, such as that of models that rank texts.
    pub(crate) fn of(gguf: &Gguf, architecture: &str) -> Result<Self, ModelError> {
        let key = format!("{architecture}.{POOLING_KEY}");
        match gguf.u32(&key)? {
            None | Some(0) => Ok(Self::Mean),
            Some(number) => Self::from_repr(number).ok_or(ModelError::Hyperparameter {
                key,
                reason: "this way of making the vector of a text is not supported; 0 and 1 (mean), 2 (first \
                         token) and 3 (last token) are",
            }),
        }
    }

    /// Number in a file.
    pub(crate) fn gguf(self) -> u32 {
        self as u32
    }

    /// Name for clients.
    pub fn name(self) -> &'static str {
        self.into()
    }
}
