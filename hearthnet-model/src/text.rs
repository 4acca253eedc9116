//! Tokenizer and chat template of a model file, checked together and against the weights: what a
//! chat needs beside the layers. `chat` and `serve` refuse what [`ModelFile::text`] refuses, and
//! [`inspect`](crate::inspect) says so beforehand.

use crate::model_file::ModelFile;
use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::{Tokenizer, TokenizerError};

/// Tokenizer and chat template of a model file.
#[derive(Debug)]
#[non_exhaustive]
pub struct ModelText {
    /// The tokenizer.
    pub tokenizer: Tokenizer,
    /// The template; `None` where the file has none. Text can be continued without one.
    pub template: Option<ChatTemplate>,
}

/// Why a model file cannot be chatted with.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer is missing, broken or not supported.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    /// The chat template is broken.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A token without an embedding: the engine could not compute it.
    #[error(
        "the tokenizer has {tokens} tokens, but the embedding and the output matrix have only {rows} rows: \
         the two are from different models"
    )]
    Vocabulary {
        /// Tokens of the tokenizer.
        tokens: usize,
        /// Rows of the embedding and of the output matrix.
        rows: u32,
    },
}

impl ModelFile {
    /// Tokenizer and chat template of the file.
    ///
    /// # Errors
    /// See [`TextError`].
    pub fn text(&self) -> Result<ModelText, TextError> {
        let tokenizer = Tokenizer::from_gguf(self.gguf())?;
        let (tokens, rows) = (tokenizer.vocab_size(), self.spec().vocab);
        // More rows than tokens are padding, which many models have.
        if u32::try_from(tokens).map_or(true, |tokens| tokens > rows) {
            return Err(TextError::Vocabulary { tokens, rows });
        }
        let template = match ChatTemplate::from_gguf(self.gguf()) {
            Ok(template) => Some(template),
            Err(TemplateError::Missing) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(ModelText {
            tokenizer,
            template,
        })
    }
}

impl ModelText {
    /// What is wrong with the file although it can be used: a sentence for people.
    pub fn warning(&self) -> Option<String> {
        let marks = self
            .template
            .as_ref()?
            .marks_encoded_as_text(&self.tokenizer);
        (!marks.is_empty()).then(|| {
            format!(
                "the model file gives {} the type of plain text, and its chat template uses them as marks: \
                 prompts are encoded differently from how the model was trained, and answers may be worse. \
                 Fetch the file from another source, or convert the model again",
                marks.join(", ")
            )
        })
    }
}
