//! Shard descriptor: a host's record of its served layers, which routing uses.

use hearthnet_transport::Code;
use serde::{Deserialize, Serialize};

use super::invite::is_line;
use crate::NodeId;

/// Maximum number of layers of a model.
///
/// The deepest published dense models have 126 layers; 1024 leaves room and bounds the router.
pub const MAX_LAYERS: u32 = 1024;

/// Maximum length of a text field of a descriptor in bytes.
pub const MAX_TEXT: usize = 256;

/// A host's description of the layers that it serves (`specs/shard-host.md`, section 5).
///
/// It comes from a peer: call [`Descriptor::validate`] before using a field.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Descriptor {
    /// Shard id, `<model_id>:<lo>-<hi>`.
    pub shard_id: String,
    /// Catalogue id or file stem of the model.
    pub model_id: String,
    /// Hash of the weights, 64 lower-case hex digits.
    pub weights_sha256: String,
    /// First and last served layer, both inclusive.
    pub layer_range: (u32, u32),
    /// Number of layers of the whole model.
    pub total_layers: u32,
    /// Memory of the layers and their KV budget, in MiB: `weights_mb + kv_mb`.
    pub vram_required_mb: u64,
    /// Memory of the layers in MiB; 0 if the host does not state it.
    #[serde(default)]
    pub weights_mb: u64,
    /// Memory for keys and values in MiB; 0 if the host does not state it.
    #[serde(default)]
    pub kv_mb: u64,
    /// Maximum number of concurrent streams.
    pub max_concurrent_streams: u32,
    pub host: NodeId,
    /// Address `ADDR:PORT` of the tensor endpoint.
    pub endpoint: String,
    /// Unix time of the advertisement, in seconds.
    pub advertised_at: u64,
    /// Data type of the residual stream between blocks: `fp16`, `bf16` or `fp32`.
    pub boundary_dtype: String,
    /// Arithmetic of the host. Results of `canonical-1` are exact.
    pub arithmetic: String,
    /// Measured milliseconds per decoded token for the whole range; 0 before the first measurement.
    pub ms_per_token: f32,
    /// Number of open streams.
    pub queue_depth: u32,
    /// Name and version of the software, and the text id ([`Descriptor::text_id`]).
    pub software: String,
}

/// Reason why a descriptor is refused. All have the code `bad_descriptor`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptorError {
    /// The bytes are not a descriptor in CBOR, or are too long.
    #[error("the descriptor cannot be read: {0}")]
    Malformed(String),
    /// The first layer is after the last one.
    #[error("the layer range {0}-{1} runs backwards")]
    Backwards(u32, u32),
    /// The range exceeds the model, or the model exceeds [`MAX_LAYERS`].
    #[error("layers up to {hi} do not fit a model of {total} layers")]
    BeyondModel {
        /// Last layer of the range.
        hi: u32,
        /// Number of layers of the model.
        total: u32,
    },
    /// A text field is too long or holds control characters.
    #[error("the field {0} is not plain text of at most {MAX_TEXT} bytes")]
    Text(&'static str),
    /// `weights_sha256` is not 64 lowercase hex digits.
    #[error("weights_sha256 is not 64 hex digits")]
    Weights,
    /// `shard_id` does not follow from the model id and the range.
    #[error("shard_id does not match model_id and layer_range")]
    ShardId,
    /// The measured time is negative or not a number.
    #[error("ms_per_token is not a finite, non-negative number")]
    Speed,
}

impl DescriptorError {
    /// Stable code of the refusal.
    pub fn code(&self) -> Code {
        Code::new("bad_descriptor")
    }
}

/// Maximum length of an encoded descriptor in bytes: the limit of a control message of X08.
pub const MAX_ENCODED: usize = 4080;

fn check_length(bytes: usize) -> Result<(), DescriptorError> {
    match bytes {
        0..=MAX_ENCODED => Ok(()),
        _ => Err(DescriptorError::Malformed(format!(
            "{bytes} bytes is too long"
        ))),
    }
}

impl Descriptor {
    /// Shard id of a model and an inclusive layer range.
    pub fn shard_id(model_id: &str, lo: u32, hi: u32) -> String {
        format!("{model_id}:{lo}-{hi}")
    }

    /// Identity of the tokenizer and chat template in the host's file, if the host states it: 64
    /// hex digits, as the product `text/` in `software`. Older nodes accept it there.
    pub fn text_id(&self) -> Option<&str> {
        self.product("text/")
    }

    /// Values per row, if the host states them, as the product `width/` in `software`. A client that
    /// does not have the model can send rows of the right length.
    pub fn width(&self) -> Option<u32> {
        let width = self.product("width/")?.parse().ok();
        width.filter(|width| *width > 0)
    }

    /// Product of `software` of a host that forks streams.
    pub const FORKS: &'static str = "fork/1";

    /// Returns whether the host opens streams with `fork`, a copy of another stream. An earlier
    /// host would close the session.
    pub fn forks(&self) -> bool {
        self.has(Self::FORKS)
    }

    /// Product of `software` of a host that answers truncations.
    pub const ANSWERS_TRUNCATION: &'static str = "truncate/1";

    /// Returns whether the host answers how many positions it kept of a stream. An earlier host
    /// would close the session.
    pub fn answers_truncation(&self) -> bool {
        self.has(Self::ANSWERS_TRUNCATION)
    }

    /// Start of the product of `software` that names the graphics card of a host, after a space.
    pub const CARD: &'static str = " card/";

    /// Graphics card that computes the host's layers, if the host says that one does. Blanks of its
    /// name are hyphens.
    pub fn card(&self) -> Option<&str> {
        self.product("card/")
    }

    fn has(&self, product: &str) -> bool {
        self.software.split(' ').any(|one| one == product)
    }

    /// Rest of the first product of `software` that begins with `prefix`.
    fn product(&self, prefix: &str) -> Option<&str> {
        let mut products = self.software.split(' ');
        products.find_map(|product| product.strip_prefix(prefix))
    }

    /// Encodes as CBOR.
    ///
    /// # Errors
    /// [`DescriptorError::Malformed`] when the result would exceed [`MAX_ENCODED`].
    pub fn to_cbor(&self) -> Result<Vec<u8>, DescriptorError> {
        let mut out = Vec::with_capacity(512);
        ciborium::into_writer(self, &mut out)
            .map_err(|e| DescriptorError::Malformed(e.to_string()))?;
        check_length(out.len())?;
        Ok(out)
    }

    /// Decodes and validates a descriptor of a peer.
    ///
    /// # Errors
    /// Any [`DescriptorError`].
    pub fn from_cbor(bytes: &[u8]) -> Result<Self, DescriptorError> {
        check_length(bytes.len())?;
        let this: Self = ciborium::de::from_reader_with_recursion_limit(bytes, 8)
            .map_err(|e| DescriptorError::Malformed(e.to_string()))?;
        this.validate()?;
        Ok(this)
    }

    /// Checks every field.
    ///
    /// # Errors
    /// The first [`DescriptorError`] that applies.
    pub fn validate(&self) -> Result<(), DescriptorError> {
        for (name, text) in [
            ("shard_id", &self.shard_id),
            ("model_id", &self.model_id),
            ("endpoint", &self.endpoint),
            ("boundary_dtype", &self.boundary_dtype),
            ("arithmetic", &self.arithmetic),
            ("software", &self.software),
        ] {
            if !is_line(text, MAX_TEXT) {
                return Err(DescriptorError::Text(name));
            }
        }
        if self.weights_sha256.len() != 64
            || !self
                .weights_sha256
                .bytes()
                .all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        {
            return Err(DescriptorError::Weights);
        }
        let (lo, hi) = self.layer_range;
        if lo > hi {
            return Err(DescriptorError::Backwards(lo, hi));
        }
        if self.total_layers > MAX_LAYERS || hi >= self.total_layers {
            return Err(DescriptorError::BeyondModel {
                hi,
                total: self.total_layers,
            });
        }
        if self.shard_id != Self::shard_id(&self.model_id, lo, hi) {
            return Err(DescriptorError::ShardId);
        }
        if !self.ms_per_token.is_finite() || self.ms_per_token < 0.0 {
            return Err(DescriptorError::Speed);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing;
    use proptest::prelude::*;

    fn good() -> Descriptor {
        testing::descriptor(testing::id(1))
    }

    #[test]
    fn a_good_descriptor_survives_the_round_trip() {
        let d = good();
        assert_eq!(Descriptor::from_cbor(&d.to_cbor().unwrap()).unwrap(), d);
    }

    #[test]
    fn the_identity_of_the_text_stands_where_nodes_of_before_take_it() {
        let mut d = good();
        assert_eq!(d.text_id(), None);
        let entries = |d: &Descriptor| match ciborium::Value::serialized(d).unwrap() {
            ciborium::Value::Map(map) => map.len(),
            other => panic!("{other:?}"),
        };
        let before = entries(&d);
        let text = "0b".repeat(32);
        d.software = format!("hearthnet/0.1.0 text/{text}");
        assert_eq!((d.text_id(), entries(&d)), (Some(&*text), before));
        assert_eq!(d.width(), None);
        d.software.push_str(" width/576");
        assert_eq!((d.text_id(), d.width()), (Some(&*text), Some(576)));
        assert!(!d.forks());
        d.software.push_str(" fork/1");
        assert!(d.forks() && !d.answers_truncation());
        d.software.push_str(" truncate/1");
        assert!(d.forks() && d.answers_truncation());
        d.validate().unwrap();
    }

    #[test]
    fn a_host_that_is_no_node_is_no_descriptor() {
        let mut bytes = good().to_cbor().unwrap();
        let host = good().host.to_string();
        let at = bytes
            .windows(host.len())
            .position(|part| part == host.as_bytes());
        // The last character carries two unused bits: setting one makes a second spelling.
        bytes[at.unwrap() + host.len() - 1] += 1;
        let refused = Descriptor::from_cbor(&bytes);
        assert!(matches!(refused, Err(DescriptorError::Malformed(_))));
    }

    #[test]
    fn every_kind_of_nonsense_has_its_own_refusal() {
        use DescriptorError::{Backwards, BeyondModel, ShardId, Speed, Text, Weights};
        let beyond = |hi, total| BeyondModel { hi, total };
        let cases: [(&dyn Fn(&mut Descriptor), DescriptorError); 8] = [
            (&|d| d.layer_range = (8, 7), Backwards(8, 7)),
            (&|d| d.layer_range = (0, u32::MAX), beyond(u32::MAX, 16)),
            (&|d| d.total_layers = u32::MAX, beyond(7, u32::MAX)),
            (&|d| d.weights_sha256 = "zz".repeat(32), Weights),
            (&|d| d.weights_sha256.clear(), Weights),
            (&|d| d.shard_id = "m:0-8".into(), ShardId),
            (&|d| d.ms_per_token = f32::NAN, Speed),
            (&|d| d.endpoint = "x".repeat(257), Text("endpoint")),
        ];
        for (change, error) in cases {
            let mut d = good();
            change(&mut d);
            assert_eq!(d.validate(), Err(error));
        }
    }

    proptest! {
        #[test]
        fn decoding_arbitrary_bytes_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..512)) {
            let _ = Descriptor::from_cbor(&bytes);
        }

        #[test]
        fn a_flipped_byte_never_panics(at in 0usize..300, to in any::<u8>()) {
            let mut bytes = good().to_cbor().unwrap();
            if let Some(b) = bytes.get_mut(at) { *b = to; }
            if let Ok(d) = Descriptor::from_cbor(&bytes) {
                prop_assert!(d.layer_range.0 <= d.layer_range.1 && d.layer_range.1 < d.total_layers);
            }
        }
    }
}
