//! Names by which requests find models: ids of models, and aliases of the configuration.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::http::StatusCode;
use hearthnet_http::ApiError;

use crate::service::{ServedModel, Service};

/// Alias that stands for every name that is neither a model nor an alias.
const ANY_OTHER: &str = "default";

/// Names of the models of a service.
pub(super) struct Names {
    service: Service,
    /// Ids of models by alias.
    aliases: BTreeMap<String, String>,
}

impl Names {
    pub(super) fn new(service: Service, aliases: BTreeMap<String, String>) -> Self {
        Self { service, aliases }
    }

    /// Model with an id, or of an alias. An id takes precedence over an alias.
    ///
    /// # Errors
    /// 404 `model_not_found`.
    pub(super) fn find(&self, name: &str) -> Result<Arc<ServedModel>, ApiError> {
        if let Some(model) = self.service.model(name) {
            return Ok(model);
        }
        let id = self.aliases.get(name).or(self.aliases.get(ANY_OTHER));
        let Some(id) = id else {
            let text = "there is no model NAME here; GET /v1/models lists those that are";
            return Err(unknown(text, name));
        };
        let model = self.service.model(id);
        model.ok_or_else(|| {
            let text = format!(
                "NAME stands for the model {id:?} (http.aliases), which is not here; GET /v1/models lists those that are"
            );
            unknown(&text, name)
        })
    }

    /// Models by their ids, the oldest first, then by aliases.
    pub(super) fn all(&self) -> Vec<(String, Arc<ServedModel>)> {
        let models = self.service.models();
        let ids = models.into_iter().map(|model| (model.id.clone(), model));
        let mut all: Vec<_> = ids.collect();
        for (alias, id) in &self.aliases {
            if let Some(model) = self.service.model(id)
                && alias != ANY_OTHER
                && all.iter().all(|(name, _)| name != alias)
            {
                all.push((alias.clone(), model));
            }
        }
        all
    }
}

/// Error for a name, of which at most 100 characters are quoted in the place of `NAME`.
fn unknown(text: &str, name: &str) -> ApiError {
    let name: String = name.chars().take(100).collect();
    let text = text.replacen("NAME", &format!("{name:?}"), 1);
    ApiError::new(StatusCode::NOT_FOUND, "model_not_found", text).about("model")
}
