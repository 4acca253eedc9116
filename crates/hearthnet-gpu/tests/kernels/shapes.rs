//! Shapes that the self-test does not have.

use hearthnet_files::BoundaryDtype;
use hearthnet_files::blocks::WeightType;
use hearthnet_gpu::testing::{Draw, weights};
use hearthnet_gpu::{Gpu, GpuError, Input};

use super::{assert_same, floats, reference, software, words};

/// Outputs, inputs and rows: one panel that is not full, several, odd numbers of rows; where the type
/// permits it, a last record of the card that is not full.
const SHAPES: [(usize, usize, usize); 6] = [
    (1, 256, 1),
    (16, 512, 3),
    (100, 256, 9),
    (33, 1280, 6),
    (40, 672, 1),
    (20, 672, 5),
];

/// A matrix of another shape, of the bytes of the self-test's.
fn matrix_bytes(ty: WeightType, rows: usize, cols: usize) -> Vec<u8> {
    let len = rows * cols / ty.inputs() * ty.file_block();
    weights(ty).into_iter().cycle().take(len).collect()
}

/// Compares products of random rows with those of the processor. `shape`: outputs, inputs, rows. A type
/// whose blocks do not fit is skipped.
pub(crate) fn products_of_shape(
    gpu: &Gpu,
    ty: WeightType,
    (outputs, inputs, rows): (usize, usize, usize),
    draw: &mut Draw,
) {
    if !inputs.is_multiple_of(ty.inputs()) {
        return;
    }
    let bytes = matrix_bytes(ty, outputs, inputs);
    let x = draw.many(rows * inputs, Draw::value);
    let packed = reference::packed(ty, &bytes, outputs, inputs);
    let matrix = gpu.matrix(&packed).unwrap();
    let (n, cols, width) = (rows as u32, inputs as u32, outputs as u32);
    // Rows of the input and of the output lie apart, behind other numbers.
    let stride = cols + 5;
    let mut apart = vec![0x7fc0_0000; 3 + rows * stride as usize];
    for (row, x) in x.chunks(inputs).enumerate() {
        apart[3 + row * stride as usize..][..inputs].copy_from_slice(x);
    }
    let plain = gpu.upload(&apart).unwrap();
    let plain = plain.rows_at(3, stride);
    let act = gpu.act(n, cols).unwrap();
    let out = gpu.buffer(u64::from(2 + n * (width + 1))).unwrap();
    let mut step = gpu.step();
    let input = step.input(ty, plain, &act, (n, cols));
    step.matmul(&matrix, input, out.rows_at(2, width + 1), n);
    step.submit().unwrap();
    let got = gpu.read(&out, 2..out.words()).unwrap();
    let wanted = reference::product(ty, &bytes, outputs, inputs, &floats(&x));
    let got: Vec<u32> = got
        .chunks(outputs + 1)
        .flat_map(|row| {
            assert_eq!(row.get(outputs), Some(&0), "a write beside the outputs");
            &row[..outputs]
        })
        .copied()
        .collect();
    let what = format!("{ty:?} {outputs}x{inputs}, {rows} rows");
    assert_same(&what, &got, &words(&wanted));
}

pub(crate) fn quantised() -> impl Iterator<Item = WeightType> {
    WeightType::ALL.into_iter().filter(|ty| ty.quantised())
}

#[test]
fn products_of_all_types_and_shapes_are_those_of_the_processor() {
    let gpu = software();
    let mut draw = Draw::new(7);
    for ty in WeightType::ALL {
        for shape in SHAPES {
            products_of_shape(&gpu, ty, shape, &mut draw);
        }
    }
}

#[test]
fn products_with_experts_take_their_rows_and_panels() {
    let gpu = software();
    let mut draw = Draw::new(8);
    for ty in [WeightType::Q4_K, WeightType::Q8_0, WeightType::F16] {
        let (experts, outputs, inputs, rows) = (3, 48, 256, 4);
        let all: Vec<u8> = matrix_bytes(ty, experts * outputs, inputs);
        let each: Vec<_> = all.chunks(all.len() / experts).collect();
        let packed: Vec<_> = each
            .iter()
            .map(|bytes| reference::packed(ty, bytes, outputs, inputs))
            .collect();
        let matrix = gpu.stack(&packed.iter().collect::<Vec<_>>()).unwrap();
        let x = draw.many(rows * inputs, Draw::value);
        let pairs = [(0, 2), (3, 0), (0, 1), (2, 2), (1, 1)];
        let list: Vec<u32> = pairs.iter().flat_map(|(row, e)| [*row, 3 * e]).collect();
        let (plain, list) = (gpu.upload(&x).unwrap(), gpu.upload(&list).unwrap());
        let act = gpu.act(rows as u32, inputs as u32).unwrap();
        let out = gpu.buffer((pairs.len() * outputs) as u64).unwrap();
        let mut step = gpu.step();
        let (n, width) = (rows as u32, outputs as u32);
        let plain = plain.rows(inputs as u32);
        let input = step.input(ty, plain, &act, (n, inputs as u32));
        let count = pairs.len() as u32;
        step.matmul_pairs(&matrix, width, &list, input, n, out.rows(width), count);
        step.submit().unwrap();
        let got = gpu.read(&out, 0..out.words()).unwrap();
        let wanted: Vec<f32> = pairs
            .iter()
            .flat_map(|(row, expert)| {
                let x = floats(&x[*row as usize * inputs..][..inputs]);
                reference::product(ty, each[*expert as usize], outputs, inputs, &x)
            })
            .collect();
        assert_same(&format!("{ty:?}"), &got, &words(&wanted));
    }
}

#[test]
fn some_panels_of_a_matrix_begin_at_column_0() {
    let gpu = software();
    let ty = WeightType::Q8_0;
    let (outputs, inputs) = (70, 64);
    let bytes = matrix_bytes(ty, outputs, inputs);
    let x = Draw::new(9).many(inputs, Draw::value);
    let matrix = gpu
        .matrix(&reference::packed(ty, &bytes, outputs, inputs))
        .unwrap();
    let (plain, act) = (gpu.upload(&x).unwrap(), gpu.act(1, 64).unwrap());
    let out = gpu.buffer(38).unwrap();
    let mut step = gpu.step();
    step.quantise(plain.rows(64), &act, 1, 64);
    step.matmul_panels(&matrix, 2..5, Input::Quantised(&act), out.rows(38), 1);
    step.submit().unwrap();
    let wanted = reference::product(ty, &bytes, outputs, inputs, &floats(&x));
    assert_same(
        "panels",
        &gpu.read(&out, 0..38).unwrap(),
        &words(&wanted[32..]),
    );
}

#[test]
fn steps_copy_clear_and_run_in_order() {
    let gpu = software();
    let a = gpu
        .upload(&[1.0f32, 2.0, 3.0, 4.0].map(f32::to_bits))
        .unwrap();
    let b = gpu.buffer(8).unwrap();
    let mut step = gpu.step();
    step.copy_words(&a, 0, &b, 0, 4);
    step.scale(b.rows(4), 1, 4, 2.0);
    step.copy_words(&b, 0, &b, 4, 4);
    step.clear(&b, 0..1);
    step.add_round(b.rows(4), a.rows(0), 2, 4, BoundaryDtype::F32);
    assert_eq!(step.ops(), 2);
    step.submit().unwrap();
    let wanted = [1.0, 6.0, 9.0, 12.0, 3.0, 6.0, 9.0, 12.0f32];
    assert_eq!(floats(&gpu.read(&b, 0..8).unwrap()), wanted);
    // More than one submission holds.
    let mut step = gpu.step();
    for _ in 0..5000 {
        step.scale(a.rows(4), 1, 4, 1.0);
    }
    step.scale(a.rows(4), 1, 4, 0.5);
    step.submit().unwrap();
    assert_eq!(floats(&gpu.read(&a, 0..4).unwrap()), [0.5, 1.0, 1.5, 2.0]);
}

#[test]
fn memory_that_cannot_be_bound_is_refused() {
    let gpu = software();
    let most = gpu.facts().max_binding_words;
    let refused = gpu.buffer(most + 1).unwrap_err();
    let (bytes, most) = (4 * (most + 1), 4 * most);
    assert_eq!(refused, GpuError::TooLarge { bytes, most });
}

#[test]
fn a_lost_card_says_so_for_ever() {
    use hearthnet_gpu::Choice;
    let gpu = Gpu::open(Choice::Software).unwrap();
    let a = gpu.upload(&[1, 2, 3, 4]).unwrap();
    gpu.destroy();
    assert!(gpu.lost());
    assert!(matches!(gpu.read(&a, 0..4), Err(GpuError::Lost(_))));
    assert!(matches!(gpu.buffer(4), Err(GpuError::Lost(_))));
    let mut step = gpu.step();
    step.scale(a.rows(4), 1, 4, 1.0);
    assert!(matches!(step.submit(), Err(GpuError::Lost(_))));
}
