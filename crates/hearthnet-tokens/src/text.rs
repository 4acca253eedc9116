//! Tokenizer and chat template of a model file, checked against each other and the weights. `chat`
//! and `serve` refuse the files that [`ModelText::of`] refuses, and [`inspect`](crate::inspect)
//! reports the reason beforehand.

use crate::template::{ChatTemplate, TemplateError};
use crate::tokenizer::Tokenizer;
use hearthnet_files::ModelFile;
use hearthnet_files::tokenizer_parts::TokenizerError;

/// Tokenizer and chat template of a model file.
#[derive(Debug)]
#[non_exhaustive]
pub struct ModelText {
    pub tokenizer: Tokenizer,
    /// `None` if the file has no template. Text can be continued without one.
    pub template: Option<ChatTemplate>,
}

/// Why a model file is unfit for chat.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TextError {
    /// The tokenizer is missing, broken or not supported.
    #[error(transparent)]
    Tokenizer(#[from] TokenizerError),
    #[error(transparent)]
    Template(#[from] TemplateError),
}

impl ModelText {
    /// Reads tokenizer and chat template of a file.
    ///
    /// # Errors
    /// See [`TextError`].
    pub fn of(model: &ModelFile) -> Result<Self, TextError> {
        let tokenizer = Tokenizer::from_gguf(model.gguf())?;
        let template = match ChatTemplate::from_gguf(model.gguf()) {
            Ok(template) => Some(template),
            Err(TemplateError::Missing) => None,
            Err(error) => return Err(error.into()),
        };
        Ok(Self {
            tokenizer,
            template,
        })
    }

    /// Warning for users about a defect of the file that does not prevent its use.
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
