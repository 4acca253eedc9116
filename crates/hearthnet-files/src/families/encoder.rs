//! Hyperparameters of encoders.

use super::family::Family;
use super::keys::{CAUSAL, Keys, PROJECTION, TYPE_COUNT};
use crate::error::ModelError;
use crate::gguf::MetadataError;
use crate::schema::Lookup as _;
use crate::spec::{EncoderSpec, LayerTensor};

impl Family {
    pub(super) fn encoder(
        &self,
        keys: &Keys<'_>,
        width: u32,
    ) -> Result<Option<EncoderSpec>, ModelError> {
        let Some(family) = self.encoder else {
            return Ok(None);
        };
        if keys.flag(CAUSAL)? == Some(true) {
            return Err(keys.bad(CAUSAL, "must be false: these models read a text as a whole"));
        }
        let token_types = match family.token_types {
            true => {
                let missing = || MetadataError::Missing(TYPE_COUNT.to_owned());
                keys.gguf.u32(TYPE_COUNT)?.ok_or_else(missing)?
            }
            false => 0,
        };
        if family.token_types && token_types == 0 {
            return Err(ModelError::Hyperparameter {
                key: TYPE_COUNT.to_owned(),
                reason: "must be at least 1",
            });
        }
        Ok(Some(EncoderSpec {
            layer_norm: self.lists(LayerTensor::AttnSumNorm),
            positions: family.positions,
            token_types,
            plain_ffn: self.lists(LayerTensor::FfnUpBias),
            projection: match family.projection {
                true => projection(keys, width)?,
                false => None,
            },
        }))
    }
}

/// Values between the two matrices behind the pooled state.
fn projection(keys: &Keys<'_>, width: u32) -> Result<Option<u32>, ModelError> {
    let [into, between, behind, out] = PROJECTION;
    let Some(values) = keys.integer(between)? else {
        return Ok(None);
    };
    for (key, expected, reason) in [
        (into, width, "must equal embedding_length"),
        (behind, values, "must equal dense_2_feat_out"),
        (out, width, "must equal embedding_length"),
    ] {
        if keys.required_integer(key)? != expected {
            return Err(keys.bad(key, reason));
        }
    }
    Ok(Some(values))
}
