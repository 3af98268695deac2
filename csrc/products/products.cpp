// pa_products: many matrix products in one call, shared out by columns.

#include <atomic>

#include "../kernels/isa.h"
#include "../kernels/parallel.h"

namespace {

struct Products {
    const isa_kernels* isa;
    int64_t count;
    const pa_product* products;
    const int64_t* segments;
    float* rows;     // the packed rows of all products, one after the other
    float* columns;  // of each worker
    int64_t columns_numel;
    std::atomic<int64_t> next_rows{0}, next_columns{0};
};

// [Note: Packing before products]
// Rows are packed by whoever comes first, in a round of their own, because every tile of a product reads them.
void pack_some(void* context, int64_t) {
    Products& all = *static_cast<Products*>(context);
    int64_t done = 0;
    float* to = all.rows;
    for (int64_t mine; (mine = all.next_rows.fetch_add(1, std::memory_order_relaxed)) < all.count;) {
        for (; done < mine; done++) to += all.products[done].rows * all.products[done].inner;
        all.isa->pack_rows(all.products + mine, to);
    }
}

void multiply_some(void* context, int64_t worker) {
    Products& all = *static_cast<Products*>(context);
    const int64_t width = all.isa->tile_columns;
    int64_t product = 0, before = 0;
    const float* rows = all.rows;
    const int64_t* segments = all.segments;
    for (int64_t mine; (mine = all.next_columns.fetch_add(1, std::memory_order_relaxed)), product < all.count;) {
        int64_t tiles;
        while (product < all.count &&
               mine >= before + (tiles = (all.products[product].columns + width - 1) / width)) {
            before += tiles;
            rows += all.products[product].rows * all.products[product].inner;
            segments += all.products[product].segments;
            product++;
        }
        if (product == all.count) break;
        const pa_product *p = all.products + product, *after = p + 1 < all.products + all.count ? p + 1 : p;
        const int64_t start = (mine - before) * width, next = start + width;
        all.isa->product_columns(p, segments, rows, start, next < p->columns ? p->b + next * p->b_column : after->b,
                                 all.columns + worker * all.columns_numel);
    }
}

}  // namespace

int64_t pa_products_scratch(int64_t count, const pa_product* products, int32_t threads) {
    int64_t rows = 0, inner = 0;
    for (int64_t i = 0; i < count; i++) {
        rows += products[i].rows * products[i].inner;
        if (products[i].inner > inner) inner = products[i].inner;
    }
    return rows + (threads > 1 ? threads : 1) * inner * isa_current()->tile_columns;
}

int32_t pa_products(int64_t count, const pa_product* products, const int64_t* segments, float* scratch, int32_t threads) {
    const int64_t* segment = segments;
    int64_t rows = 0, inner = 0;
    for (int64_t i = 0; i < count; i++) {
        const pa_product& p = products[i];
        if (p.rows < 0 || p.inner < 0 || p.columns < 0 || p.segments < 1) return PA_BAD_COUNT;
        int64_t sum = 0;
        for (int64_t s = 0; s < p.segments; s++) {
            if (*segment < 0) return PA_BAD_COUNT;
            sum += *segment++;
        }
        if (sum != p.inner) return PA_BAD_COUNT;
        rows += p.rows * p.inner;
        if (p.inner > inner) inner = p.inner;
    }
    const isa_kernels* const isa = isa_current();
    const int32_t workers = threads > 1 ? threads : 1;
    Products all{isa, count, products, segments, scratch, scratch + rows, inner * isa->tile_columns};
    parallel_for(workers, workers, pack_some, &all);
    parallel_for(workers, workers, multiply_some, &all);
    return 0;
}
