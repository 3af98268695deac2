// pa_symmetric: a product that is known to be symmetric, for little more than half of its operations.

#include <atomic>

#include "../kernels/isa.h"
#include "../kernels/parallel.h"

namespace {

struct Symmetric {
    const isa_kernels* isa;
    const pa_symmetric* product;
    float* rows;     // packed
    float* columns;  // of each worker
    int64_t columns_numel;
    std::atomic<int64_t> next{0};
};

void pack_panel(void* context, int64_t panel) {
    const Symmetric& all = *static_cast<Symmetric*>(context);
    all.isa->symmetric_rows(all.product, panel, all.rows);
}

// The last columns first: they reach down the furthest.
void multiply_some(void* context, int64_t worker) {
    Symmetric& all = *static_cast<Symmetric*>(context);
    const int64_t width = all.isa->tile_columns, tiles = (all.product->size + width - 1) / width;
    for (int64_t mine; (mine = all.next.fetch_add(1, std::memory_order_relaxed)) < tiles;)
        all.isa->symmetric_columns(all.product, all.rows, (tiles - 1 - mine) * width,
                                   all.columns + worker * all.columns_numel);
}

void mirror_rows(void* context, int64_t part) {
    const Symmetric& all = *static_cast<Symmetric*>(context);
    all.isa->symmetric_mirror(all.product, part * all.isa->mirrored);
}

}  // namespace

int64_t pa_symmetric_scratch(int64_t size, int64_t inner, int32_t threads) {
    return (size + (threads > 1 ? threads : 1) * isa_current()->tile_columns) * inner;
}

int32_t pa_symmetric_product(const pa_symmetric* product, float* scratch, int32_t threads) {
    if (product->size < 0 || product->inner < 0) return PA_BAD_COUNT;
    if (!product->size) return 0;
    const isa_kernels* const isa = isa_current();
    const int32_t workers = threads > 1 ? threads : 1;
    Symmetric all{isa, product, scratch, scratch + product->size * product->inner, product->inner * isa->tile_columns};
    parallel_for(isa->symmetric_panels(product), workers, pack_panel, &all);
    parallel_for(workers, workers, multiply_some, &all);
    parallel_for((product->size + isa->mirrored - 1) / isa->mirrored, workers, mirror_rows, &all);
    return 0;
}
