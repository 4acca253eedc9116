//! The real model's first blocks, its embedding and its logits, computed launch by launch on the card for
//! tests, are the engine's bytes.

use crate::emulation::{Card, Program};
use crate::values::{assert_same, bytes, floats, ints, nothing};
use hearthnet_cuda::launch::{self, Cache, Heads, Launch, Quantised, Weights};
use hearthnet_model::engine::{Engine, EngineOptions, Head, RopeTables, Span};
use hearthnet_model::families::{EMBEDDING, OUTPUT_NORM};
use hearthnet_model::kernels::{Arena, Matrix, PAGE, Packed, WeightType, page_len};
use hearthnet_model::{BoundaryDtype, LayerTensor, ModelFile, ModelSpec, TensorView};

/// Blocks that are computed: what the first one writes, the others read.
const LAYERS: u32 = 2;

/// Buffers of the card, by their number.
struct Memory<'a> {
    card: Card<'a>,
    buffers: Vec<Vec<u8>>,
}

impl Memory<'_> {
    fn put(&mut self, bytes: Vec<u8>) -> usize {
        self.buffers.push(bytes);
        self.buffers.len() - 1
    }

    fn room(&mut self, floats: usize) -> usize {
        self.put(nothing(floats))
    }

    fn run(&mut self, launch: launch::Result<usize>) {
        let launch: Launch<usize> = launch.unwrap();
        self.card.run(&launch, &mut self.buffers);
    }

    fn read(&self, buffer: usize) -> Vec<f32> {
        floats(&self.buffers[buffer])
    }

    fn matrix(&mut self, tensor: &TensorView<'_>) -> Weights<usize> {
        let weight_type = WeightType::of(tensor.dtype).unwrap();
        let (outputs, inputs) = (tensor.rows(), tensor.cols());
        let matrix = Matrix {
            weight_type,
            rows: outputs,
            cols: inputs,
            bytes: tensor.bytes,
        };
        let packed = Packed::pack(&mut Arena::default(), &matrix).unwrap();
        Weights {
            buffer: self.put(packed.data().to_vec()),
            weight_type,
            outputs,
            inputs,
        }
    }

    fn vector(&mut self, tensor: &TensorView<'_>) -> usize {
        assert_eq!(tensor.dtype.name(), "F32");
        self.put(tensor.bytes.to_vec())
    }

    /// `x` with some matrices; few rows one by one, many on tensor cores.
    fn products(&mut self, x: usize, rows: usize, matrices: &[Weights<usize>]) -> Vec<usize> {
        let inputs = matrices[0].inputs;
        let blocks = rows * inputs / 32;
        let act = Quantised {
            quants: self.room(8 * blocks),
            scales: self.room(blocks),
            sums: self.room(2 * blocks),
        };
        self.run(launch::quantise(x, rows, inputs, act));
        let product = |weights: &Weights<usize>| {
            let out = self.room(rows * weights.outputs);
            self.run(match rows {
                1 => launch::matvec(*weights, act, rows, out),
                _ => launch::matmul(*weights, act, rows, out),
            });
            out
        };
        matrices.iter().map(product).collect()
    }
}

/// A block of Llama on the card.
struct Layer {
    attn_norm: usize,
    qkv: [Weights<usize>; 3],
    output: Weights<usize>,
    ffn_norm: usize,
    gate_up: [Weights<usize>; 2],
    down: Weights<usize>,
    cells: usize,
}

impl Layer {
    fn of(memory: &mut Memory<'_>, file: &ModelFile, layer: u32, cells: usize) -> Self {
        use LayerTensor as T;
        let tensor = |which| file.layer_tensor(layer, which).unwrap();
        Self {
            attn_norm: memory.vector(&tensor(T::AttnNorm)),
            qkv: [T::AttnQ, T::AttnK, T::AttnV].map(|which| memory.matrix(&tensor(which))),
            output: memory.matrix(&tensor(T::AttnOutput)),
            ffn_norm: memory.vector(&tensor(T::FfnNorm)),
            gate_up: [T::FfnGate, T::FfnUp].map(|which| memory.matrix(&tensor(which))),
            down: memory.matrix(&tensor(T::FfnDown)),
            cells: memory.put(vec![0xff; cells]),
        }
    }

    /// Section 3 of the specification, launch by launch; `x` is replaced.
    fn run(
        &self,
        memory: &mut Memory<'_>,
        spec: &ModelSpec,
        x: usize,
        shape: &Heads,
        angles: (usize, usize),
        (table, pages): (usize, usize),
    ) {
        let (rows, width) = (shape.rows, spec.width as usize);
        let ffn = spec.ffn as usize;
        let (heads, pairs) = (shape.heads, spec.rope.dims as usize / 2);
        let cache = Cache {
            cells: self.cells,
            pages,
            table,
            table_pages: pages / shape.kv_heads,
        };
        let y = memory.room(rows * width);
        memory.run(launch::rms_norm(
            x,
            self.attn_norm,
            spec.norm_eps,
            rows,
            width,
            y,
        ));
        let qkv = memory.products(y, rows, &self.qkv);
        let (q, k, v) = (qkv[0], qkv[1], qkv[2]);
        let kind = spec.rope.kind;
        memory.run(launch::rope(q, angles, kind, heads, pairs, shape));
        memory.run(launch::rope(k, angles, kind, shape.kv_heads, pairs, shape));
        memory.run(launch::store_kv(k, v, shape, cache));
        let stride = shape.position + rows;
        let scores = (memory.room(rows * heads * stride), stride);
        let inverse = memory.room(rows * heads);
        let attended = memory.room(rows * heads * shape.head_dim);
        let scale = 1.0 / (shape.head_dim as f32).sqrt();
        memory.run(launch::attention_scores(
            q,
            shape,
            (scale, None),
            cache,
            scores,
        ));
        memory.run(launch::attention_softmax(scores, shape, None, inverse));
        memory.run(launch::attention_mix(
            scores, inverse, shape, cache, attended,
        ));
        let b = memory.products(attended, rows, &[self.output])[0];
        memory.run(launch::add_round(
            x,
            b,
            BoundaryDtype::F32,
            rows,
            width,
            false,
        ));
        memory.run(launch::rms_norm(
            x,
            self.ffn_norm,
            spec.norm_eps,
            rows,
            width,
            y,
        ));
        let gate_up = memory.products(y, rows, &self.gate_up);
        memory.run(launch::gate(
            gate_up[0],
            gate_up[1],
            spec.activation,
            rows * ffn,
        ));
        let b = memory.products(gate_up[0], rows, &[self.down])[0];
        memory.run(launch::add_round(x, b, spec.boundary, rows, width, false));
    }
}

#[test]
fn a_prompt_and_the_token_after_it_are_the_engines_bytes() {
    let file = ModelFile::open(&hearthnet_testkit::smollm2()).unwrap();
    let spec = file.spec().clone();
    assert_eq!(spec.architecture, "llama");
    let options = EngineOptions::default();
    let mut engine = Engine::load(&file, 0..LAYERS, &options, &mut |_, _| ()).unwrap();
    let head = Head::beside(&file, &engine).unwrap();
    let mut ropes = RopeTables::of(&file).unwrap();
    ropes.cover(8);
    let table = ropes.table(spec.rotation(0)).unwrap();
    let (cosines, sines): (Vec<_>, Vec<_>) = (0..8).map(|p| table.angles(p).unwrap()).unzip();

    let (width, vocab) = (spec.width as usize, spec.vocab as usize);
    let (kv_heads, head_dim) = (spec.kv_heads as usize, spec.head_dim as usize);
    let mut memory = Memory {
        card: Program::of_this_crate().card(),
        buffers: Vec::new(),
    };
    let angles = (
        memory.put(bytes(&cosines.concat())),
        memory.put(bytes(&sines.concat())),
    );
    // A page per key/value head, the last one first.
    assert!(cosines.len() < PAGE);
    let pages = (memory.put(ints((0..kv_heads as i32).rev())), kv_heads);
    let cells = kv_heads * page_len(head_dim) * 2;
    let layers: Vec<Layer> = (0..LAYERS)
        .map(|layer| Layer::of(&mut memory, &file, layer, cells))
        .collect();
    let embedding = memory.matrix(&file.tensor(EMBEDDING).unwrap());
    assert!(spec.tied_embedding);
    let output_norm = memory.vector(&file.tensor(OUTPUT_NORM).unwrap());

    let seq = engine.open().unwrap();
    for (position, tokens) in [(0, &[1u32, 4093, 198, 2683, 506][..]), (5, &[260][..])] {
        let rows = tokens.len();
        let (mut wanted, mut logits) = (Vec::new(), Vec::new());
        head.embed(tokens, &mut wanted).unwrap();
        let ids = memory.put(ints(tokens.iter().map(|token| *token as i32)));
        let x = memory.room(rows * width);
        memory.run(launch::embed(embedding, ids, rows, x));
        memory.run(launch::multiply(x, 1.0, spec.boundary, rows * width));
        assert_same("embedding", &memory.read(x), &wanted);

        let span = Span {
            seq,
            position: position as u32,
            rows: rows as u32,
        };
        engine.forward(&[span], &mut wanted).unwrap();
        let shape = Heads {
            heads: spec.heads as usize,
            kv_heads,
            head_dim,
            position,
            rows,
            window: None,
        };
        for layer in &layers {
            layer.run(&mut memory, &spec, x, &shape, angles, pages);
        }
        assert_same("blocks", &memory.read(x), &wanted);

        let last = wanted[(rows - 1) * width..].to_vec();
        head.logits(&last, &mut logits).unwrap();
        let (last, y) = (memory.put(bytes(&last)), memory.room(width));
        memory.run(launch::rms_norm(
            last,
            output_norm,
            spec.norm_eps,
            1,
            width,
            y,
        ));
        let out = memory.products(y, 1, &[embedding])[0];
        assert_eq!(logits.len(), vocab);
        assert_same("logits", &memory.read(out), &logits);
    }
}
