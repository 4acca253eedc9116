//! `hearthnet embed`: vectors of texts, computed on this machine alone.

use std::io;

use hearthnet_engine::{Embedder, EngineError};
use hearthnet_files::WeightsId;
use hearthnet_tokens::tokenizer::{Special, Tokenizer};
use serde::Serialize;

use crate::cli::args::EmbedArgs;
use crate::cli::{Failure, Kind, Progress, failure, print_result};
use crate::config::Context;
use crate::models::open_file::model_failure;
use crate::models::{load_failure, open_for_vectors};

#[derive(Serialize)]
struct Vectors<'a> {
    model: &'a str,
    weights: WeightsId,
    /// How the vectors are made of the hidden states.
    pooling: &'static str,
    dimensions: u32,
    /// In the order of the texts.
    vectors: Vec<Vec<f32>>,
}

pub(crate) fn run(args: &EmbedArgs, cx: &Context) -> Result<(), Failure> {
    let model = open_for_vectors(cx, args.model.as_ref())?;
    let unusable = |error: &dyn std::fmt::Display| model_failure(&model.path, error);
    let tokenizer = Tokenizer::from_gguf(model.file.gguf()).map_err(|e| unusable(&e))?;
    let texts = match args.texts.is_empty() {
        true => io::stdin().lines().collect::<io::Result<_>>()?,
        false => args.texts.clone(),
    };
    let mut inputs = Vec::new();
    for (number, text) in (1..).zip(&texts) {
        let ids = tokenizer.encode_document(text, Special::Plain);
        let ids = ids.map_err(|e| failure!(BadRequest, "text {number}: {e}"))?;
        if text.is_empty() || ids.is_empty() {
            return Err(failure!(BadRequest, "text {number} is empty")
                .hint("an empty text has no vector: leave it out"));
        }
        inputs.push(ids);
    }
    let options = cx.config.engine_options(Some(args.threads));
    let embedder = Progress::during("loading the model", |set| {
        Embedder::load(&model.file, &options, set)
    });
    let mut embedder = embedder.map_err(|e| load_failure(&model.path, &e))?;
    let mut vectors = Vec::new();
    for (number, ids) in (1..).zip(&inputs) {
        let vector = embedder.embed(ids);
        vectors.push(vector.map_err(|error| {
            match error {
                EngineError::ContextFull { limit, .. } => failure!(
                    BadRequest,
                    "text {number} has {} tokens, and the context of the model {limit}",
                    ids.len()
                )
                .hint("cut it into several texts"),
                error => Failure::new(Kind::Host, format!("text {number}: {error}")),
            }
        })?);
    }
    let found = Vectors {
        model: &model.id,
        weights: model.weights,
        pooling: embedder.pooling().name(),
        dimensions: model.file.spec().width,
        vectors,
    };
    print_result(args.json, &found, || {
        let line = |vector: &Vec<f32>| {
            let values: Vec<String> = vector.iter().map(f32::to_string).collect();
            values.join(" ") + "\n"
        };
        found.vectors.iter().map(line).collect()
    })
}
