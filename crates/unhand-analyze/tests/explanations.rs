//! Whole explanations as a person reads them.

mod support;

use support::recording;
use unhand_analyze::{Diff, ExplainOptions, TextOptions, explain, render};

fn page(name: &str) -> String {
    let options = ExplainOptions { file: Some(format!("{name}.pickle.xz")), ..ExplainOptions::default() };
    let text =
        render(&explain(&recording(name), 0, &options).expect("device 0 is there"), &TextOptions::default());
    let widest = text.lines().map(|line| line.chars().count()).max().unwrap_or(0);
    assert!(widest <= 100, "{name}: a line of {widest} columns");
    assert!(!text.contains('\x1b'), "plain text has no escape codes");
    text
}

#[test]
fn explains_a_training_run() {
    insta::assert_snapshot!(page("gpt2.stacks"), @r"
    gpt2.stacks.pickle.xz, device 0
    38,413 events over 4.3 s, 12 steps, with stacks

    Peaks
      requested           14.4 GiB  after 3.2 s, in step 11
      allocated  at least 14.4 GiB  after 3.2 s, in step 11
      reserved            16.5 GiB  after 3.2 s, in step 11
      PyTorch held up to 2.2 GiB more from the driver than its blocks ever needed at once (13% of the
      reserved peak).

    At the peak
      After 3.2 s, in step 11, 14.4 GiB were held by 699 blocks: activations 69%, backward (gradients or
      temporaries) 21%, optimizer state 6%, parameters 3%.
        4.4 GiB   31%     48 blocks  activations      activations.py:66 (forward) from record.py:17
        3.0 GiB   21%      2 blocks  backward         (no Python frames)
        1.9 GiB   13%     24 blocks  activations      pytorch_utils.py:119 (forward) from record.py:17
        1.5 GiB   10%      2 blocks  activations      loss_utils.py:40 from record.py:17
      949.4 MiB    6%    296 blocks  optimizer state  record.py:17 (gpt2)
      474.7 MiB    3%    148 blocks  parameters       modeling_utils.py:3706 (to) from record.py:14
      285.8 MiB    2%     24 blocks  activations      sdpa_attention.py:158 from record.py:17
      282.0 MiB    2%     36 blocks  activations      modeling_gpt2.py:273 (forward) from record.py:17
        1.6 GiB  in 14 more holders

    At the end
      Of 16.5 GiB reserved, 1.5 GiB are still allocated in 447 blocks: optimizer state 64%, parameters
      32%, library workspaces 4%.
      949.4 MiB        3.4 s    296 blocks  optimizer state  record.py:17 (gpt2)
      474.7 MiB        4.3 s    148 blocks  parameters       modeling_utils.py:3706 from record.py:14
       33.0 MiB        3.9 s      2 blocks  workspace        pytorch_utils.py:119 from record.py:17
       32.0 MiB        3.6 s       1 block  workspace        (no Python frames)
      (second column: the age of the oldest block)
      No leak suspected: nothing that the 12 steps allocated grew with them.

    Cached
      15.1 GiB are reserved but hold no block: torch.cuda.empty_cache() would return 14.7 GiB, 441.1 MiB
      are stuck beside live blocks.
      - 1 segment (590.0 MiB) is pinned by 3 blocks (326.5 MiB together) allocated at record.py:17 and
        threads without Python frames; re-creating them would return 263.5 MiB.
      - 35 segments (698.0 MiB) are pinned by 199 blocks (566.0 MiB together) allocated at record.py:17;
        re-creating them would return 132.0 MiB.
      - 18 segments (360.0 MiB) are pinned by 47 blocks (315.8 MiB together) allocated at
        transformers/modeling_utils.py:3706; re-creating them would return 44.3 MiB.
      1.4 MiB are stuck beside other mixtures of lines.
      The largest:
        segment 0x7f5cc6000000: 263.5 MiB of 590.0 MiB stuck, beside 3 live blocks
          0x7f5cc6000000  147.2 MiB  record.py:17 (gpt2)
          0x7f5ccf33cc00   32.0 MiB  (no Python frames) (the size of a cuBLAS workspace)
          0x7f5cd133cc00  147.2 MiB  record.py:17 (gpt2)
        segment 0x7f5e3c400000: 17.0 MiB of 20.0 MiB stuck, beside 1 live block
          0x7f5e3d3c0000    3.0 MiB  record.py:17 (gpt2)
        segment 0x7f5d14400000: 11.0 MiB of 20.0 MiB stuck, beside 2 live blocks
          0x7f5d14400000    6.8 MiB  record.py:17 (gpt2)
          0x7f5d14ac0000    2.3 MiB  record.py:17 (gpt2)
    ");
}

#[test]
fn explains_a_leak() {
    insta::assert_snapshot!(page("leak.stacks"), @r"
    leak.stacks.pickle.xz, device 0
    14,776 events over 5.0 s, 40 steps, with stacks

    Peaks
      requested           6.9 GiB  after 4.8 s, in step 40, during Optimizer.step#Adam.step
      allocated  at least 6.9 GiB  after 4.8 s, in step 40, during Optimizer.step#Adam.step
      reserved            6.9 GiB  after 4.8 s

    Leak suspects
      Each repetition of record.py:40 leaves 49 blocks, 144.0 MiB; 40 repetitions so far: 5.6 GiB. They
      are activations.

    At the peak
      After 4.8 s, in step 40, during Optimizer.step#Adam.step, 6.9 GiB were held by 2,101 blocks:
      activations 80%, optimizer state 7%, parameters 4%, gradients 4%, temporaries of the optimizer
      step 4%, library workspaces 1%, unknown 1%.
        5.5 GiB   80%  1,858 blocks  activations      record.py:40 (leak)
      512.3 MiB    7%     64 blocks  optimizer state  record.py:40 (leak)
      256.2 MiB    4%     32 blocks  parameters       record.py:38 (leak)
      256.2 MiB    4%     32 blocks  optimizer step   record.py:40 (leak)
      256.2 MiB    4%     32 blocks  gradients        (no Python frames)
       40.0 MiB    1%     81 blocks  unknown          record.py:40 (leak)
       32.0 MiB   <1%       1 block  workspace        record.py:40 (leak)
       32.0 MiB   <1%       1 block  workspace        (no Python frames)

    At the end
      Of 6.9 GiB reserved, 6.4 GiB are still allocated in 2,060 blocks: activations 87%, optimizer state
      8%, parameters 4%, library workspaces 1%, unknown 1%.
        5.6 GiB       760 ms  1,881 blocks  activations      record.py:40 (leak)
      512.3 MiB       516 ms     64 blocks  optimizer state  record.py:40 (leak)
      256.2 MiB        5.0 s     32 blocks  parameters       record.py:38 (leak)
       40.0 MiB       763 ms     81 blocks  unknown          record.py:40 (leak)
       32.0 MiB       757 ms       1 block  workspace        record.py:40 (leak)
       32.0 MiB       551 ms       1 block  workspace        (no Python frames)
      (second column: the age of the oldest block)

    Cached
      450.5 MiB are reserved but hold no block: torch.cuda.empty_cache() would return 450.0 MiB,
      523.5 KiB are stuck beside live blocks.
    ");
}

#[test]
fn explains_streams_and_pools() {
    insta::assert_snapshot!(page("streams.default"), @r"
    streams.default.pickle.xz, device 0
    2,516 events over 232 ms, without stacks

    Peaks
      requested           479.7 MiB  after 232 ms
      allocated  at least 479.8 MiB  after 232 ms
      reserved            608.0 MiB  after 232 ms
      PyTorch held up to 128.2 MiB more from the driver than its blocks ever needed at once (21% of the
      reserved peak).

    At the peak
      After 232 ms, 479.7 MiB were held by 82 blocks.
      221.5 MiB   46%     50 blocks  MemPool (0, 1), default stream
      135.9 MiB   28%     13 blocks  default pool, stream 0xa136650: 2 × 15.0 MiB
       41.0 MiB    9%      5 blocks  default pool, default stream: 2 × 4.0 MiB
       37.0 MiB    8%      4 blocks  CUDA graph pool (1, 0), stream 0xa1469b0
       22.6 MiB    5%      5 blocks  default pool, stream 0xa129940
       21.8 MiB    5%      3 blocks  default pool, stream 0xa139b60
           16 B   <1%      2 blocks  default pool, stream 0xa1469b0: 2 × 8 B
      No stacks were recorded, so the lines that allocated these blocks are not known. To have them next
      time: torch.cuda.memory._record_memory_history().

    At the end
      Of 608.0 MiB reserved, 468.0 MiB are still allocated in 81 blocks.
      221.5 MiB         1 ms     50 blocks  MemPool (0, 1), default stream
      120.9 MiB       188 ms     12 blocks  default pool, stream 0xa136650
       41.0 MiB       184 ms      5 blocks  default pool, default stream: 2 × 4.0 MiB
       37.0 MiB        48 ms      4 blocks  CUDA graph pool (1, 0), stream 0xa1469b0
       22.6 MiB       185 ms      5 blocks  default pool, stream 0xa129940
       21.8 MiB       188 ms      3 blocks  default pool, stream 0xa139b60
           16 B        55 ms      2 blocks  default pool, stream 0xa1469b0: 2 × 8 B
      (second column: the age of the oldest block)
      Leaks were not looked for: neither stacks nor steps were recorded, so repetitions cannot be told
      apart.

    Cached
      140.0 MiB are reserved but hold no block: torch.cuda.empty_cache() would return 16.0 MiB,
      124.0 MiB are stuck beside live blocks.
      - 26 segments (368.0 MiB) are pinned by 44 blocks (244.0 MiB together); re-creating them would
        return 124.0 MiB.
      The largest:
        segment 0x7f959c000000: 16.0 MiB of 20.0 MiB stuck, beside 1 live block
          0x7f959c400000    4.0 MiB
        segment 0x7f9562000000: 12.0 MiB of 20.0 MiB stuck, beside 2 live blocks
          0x7f9562000000    4.0 MiB
          0x7f9562400000    4.0 MiB
        segment 0x7f959e000000: 9.1 MiB of 12.0 MiB stuck, beside 1 live block
          0x7f959e2e2e00    2.9 MiB

    By stream
      default         296.0 MiB reserved  265.2 MiB allocated   30.8 MiB cached
      0xa136650       174.0 MiB reserved  120.9 MiB allocated   53.1 MiB cached
      0xa1469b0        56.0 MiB reserved   37.0 MiB allocated   19.0 MiB cached
      0xa129940        42.0 MiB reserved   23.1 MiB allocated   18.9 MiB cached
      0xa139b60        40.0 MiB reserved   21.8 MiB allocated   18.2 MiB cached
      - 109.1 MiB are cached for 4 side streams and cannot serve another stream.

    By memory pool
      default                 312.0 MiB reserved  206.9 MiB allocated  105.1 MiB cached
      MemPool (0, 1)          242.0 MiB reserved  224.2 MiB allocated   17.8 MiB cached
      CUDA graph pool (1, 0)   54.0 MiB reserved   37.0 MiB allocated   17.0 MiB cached
    ");
}

#[test]
fn explains_an_out_of_memory_error() {
    insta::assert_snapshot!(page("gpt2.gc"), @r"
    gpt2.gc.pickle.xz, device 0
    34,113 events over 3.0 s, 10 steps, without stacks, garbage_collection_threshold:0.6

    Peaks
      requested           9.9 GiB  after 3.0 s
      allocated  at least 9.9 GiB  after 3.0 s
      reserved           10.7 GiB  after 3.0 s
      PyTorch held up to 794.2 MiB more from the driver than its blocks ever needed at once (7% of the
      reserved peak).

    Out of memory
      - After 3.0 s: The GPU was not full (90.0 GiB free for a block of 1.5 GiB): either a limit of this
        process (torch.cuda.set_per_process_memory_fraction), which must lie between 10.7 GiB and
        12.1 GiB, or the driver could not back the allocation with host memory. Of the 10.6 GiB
        reserved, only 770.4 MiB were free for this request, in 190 holes (the largest: 22.6 MiB).
        Live then: 9.9 GiB, reserved 10.6 GiB; the largest block that would have fitted: at least
        72.0 MiB.

    At the peak
      After 3.0 s, 9.9 GiB were held by 696 blocks.
        9.9 GiB  100%    696 blocks  default pool, default stream: 60 × 93.8 MiB, 88 × 23.4 MiB
      No stacks were recorded, so the lines that allocated these blocks are not known. To have them next
      time: torch.cuda.memory._record_memory_history().

    At the end
      Of 10.6 GiB reserved, 65.0 MiB are still allocated in 3 blocks.
       65.0 MiB        2.6 s      3 blocks  default pool, default stream: 2 × 32.0 MiB
      (second column: the age of the oldest block)
      No leak suspected: nothing that the 10 steps allocated grew with them.

    Cached
      10.6 GiB are reserved but hold no block: torch.cuda.empty_cache() would return 10.0 GiB, 559.0 MiB
      are stuck beside live blocks.
      - 2 segments (592.0 MiB) are pinned by 2 blocks (33.0 MiB together); re-creating them would return
        559.0 MiB.
      The largest:
        segment 0x7efa88000000: 558.0 MiB of 590.0 MiB stuck, beside 1 live block
          0x7efa9133cc00   32.0 MiB  (the size of a cuBLAS workspace)
        segment 0x7efbf5400000: 1.0 MiB of 2.0 MiB stuck, beside 1 live block
          0x7efbf5484800    1.0 MiB
    ");
}

#[test]
fn explains_what_a_setting_changed() {
    let of = |name: &str| {
        let options = ExplainOptions { file: Some(format!("{name}.pickle.xz")), ..ExplainOptions::default() };
        explain(&recording(name), 0, &options).expect("device 0 is there")
    };
    let diff = Diff::between(&of("gpt2.default"), &of("gpt2.split64"));
    insta::assert_snapshot!(diff.render(&TextOptions::default()), @r"
    gpt2.default.pickle.xz, device 0  ->  gpt2.split64.pickle.xz, device 0
      max_split_size_mb: not set -> 64

      peak requested     14.4 GiB    14.4 GiB        same
      peak allocated     14.4 GiB    14.4 GiB        same
      peak reserved      16.5 GiB    28.3 GiB   +11.7 GiB
      end requested       1.5 GiB     1.5 GiB        same
      end allocated       1.5 GiB     1.5 GiB    +1.5 MiB
      end reserved       16.5 GiB    28.3 GiB   +11.7 GiB
      returnable         14.7 GiB    26.6 GiB   +12.0 GiB
      stuck             441.1 MiB   167.6 MiB  -273.5 MiB
      segments                226         337        +111
      stuck segments           56          55          -1
      ooms                      0           0        same

    Stuck memory
       441.1 MiB ->  167.6 MiB  in 56 -> 55 segments, beside live blocks
    ");
}
